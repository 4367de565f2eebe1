"""The growing caches against a plain list of rows: what they hold, what can be trimmed, and that nothing is copied."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache
from support.drafts import draft_config
from support.runs import Watch, make_draft
from support.targets import tiny_target

import mlx_dflash
from mlx_dflash.caches.growing import GrowingKVCache
from mlx_dflash.caches.windowed import WindowedKVCache

HEADS, SIZE = 2, 4


def rows(first, count):
    """Keys and values (1, H, count, d) that tell their position: key rows hold it, value rows its negative."""
    positions = mx.arange(first, first + count).astype(mx.float32).reshape(1, 1, count, 1)
    keys = mx.broadcast_to(positions, (1, HEADS, count, SIZE))
    return keys, -keys


def positions(fetched):
    """The positions that fetched keys and values hold, after checking that they belong together."""
    keys, values = (np.array(part) for part in fetched)
    assert (keys == -values).all() and (keys == keys[:, :1, :, :1]).all()
    return keys[0, 0, :, 0].astype(int).tolist()


def walk(cache, seed, steps, window=None, slack=None):
    """A random walk of appends, tried blocks and trims; after each step the cache is the list of its positions."""
    rng, end = np.random.RandomState(seed), 0
    for step in range(steps):
        action, count = rng.choice(["append", "append", "block", "trim"]), int(rng.randint(1, 12))
        if rng.rand() < 0.05:
            count = int(rng.randint(12, 200))
        case = f"seed {seed}, step {step}: {action} {count} at {end}"
        if action == "trim":
            count = min(count, end, slack or end)
            assert cache.max_trim() >= 0, case
            if count <= cache.max_trim():
                assert cache.trim(count) == count, case
                end -= count
        else:
            call = cache.update_and_fetch if action == "append" else cache.write_block
            found = positions(call(*rows(end, count)))
            # The first of the new rows sees window - 1 rows before it.
            first = 0 if window is None else max(0, end - window + 1)
            assert found == list(range(first, end + count)), case
            end += count if action == "append" else 0
        assert cache.offset == end, case
        if end:
            assert positions(cache.state[:2]) == list(range(max(0, end - window) if window else 0, end)), case


@pytest.mark.parametrize("seed", range(8))
def test_a_growing_cache_is_a_list(seed):
    cache = GrowingKVCache()
    if seed % 2:
        cache.reserve(300)
    walk(cache, seed, 60)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window, slack", [(1, 8), (8, 4), (8, 64), (64, 16), (100, 12)])
def test_a_windowed_cache_is_the_end_of_a_list(window, slack, seed):
    walk(WindowedKVCache(window, slack), seed, 60, window, slack)


@pytest.mark.parametrize("window, slack", [(8, 6), (64, 16), (1, 3)])
def test_a_window_can_always_trim_its_slack(window, slack):
    """After any append, slack rows can go back, and the rows that the next one sees are all there."""
    cache, end, rng = WindowedKVCache(window, slack), 0, np.random.RandomState(0)
    for _ in range(120):
        count = int(rng.randint(1, slack + 1))
        cache.update_and_fetch(*rows(end, count))
        end += count
        back = int(rng.randint(0, min(slack, end) + 1)) if end > slack else 0
        back = min(back, count)  # a round takes back rows of its own block
        assert cache.trim(back) == back, f"{back} of {count} rows at {end}"
        end -= back
        assert positions(cache.write_block(*rows(end, 1))) == list(range(max(0, end - window + 1), end + 1))


@pytest.mark.parametrize("chunks", [[1] * 30, [5, 1, 1, 9, 1], [20, 1, 1], [3, 3, 3, 3, 3, 1, 1, 1]])
def test_a_windowed_cache_sees_what_mlx_lms_rotating_one_sees(chunks):
    """With the mask of each, the visible positions of every new row are the same."""
    window, end = 8, 0
    ours, stock = WindowedKVCache(window), RotatingKVCache(window)
    for count in chunks:
        seen = []
        for cache in (ours, stock):
            mask = cache.make_mask(count, window_size=window, return_array=True)
            held = np.array(positions(cache.update_and_fetch(*rows(end, count))))
            mask = np.ones((count, len(held)), bool) if mask is None else np.array(mask)
            seen.append([sorted(held[row]) for row in mask])
        end += count
        assert seen[0] == seen[1], f"{count} rows up to {end}: {seen[0]} instead of {seen[1]}"
        assert seen[0] == [list(range(max(0, p - window + 1), p + 1)) for p in range(end - count, end)]


@pytest.mark.parametrize("count", [1, 3, 8, 20])
@pytest.mark.parametrize("start", [0, 4, 7, 8, 30])
def test_the_windows_mask_fits_what_it_fetches(start, count):
    for window_size in (None, 8, 4):
        cache = WindowedKVCache(8)
        if start:
            cache.update_and_fetch(*rows(0, start))
        mask = cache.make_mask(count, window_size=window_size)
        held = np.array(positions(cache.update_and_fetch(*rows(start, count))))
        if mask is None or isinstance(mask, str):
            visible = np.ones((count, len(held)), bool)
            if mask == "causal":  # lower right, as mx.fast.scaled_dot_product_attention reads it
                visible = np.tril(visible, len(held) - count)
        else:
            visible = np.array(mask)
        for row, p in zip(visible, range(start, start + count), strict=True):
            expected = list(range(max(0, p - (window_size or 8) + 1), p + 1))
            assert held[row].tolist() == expected, f"position {p}, window {window_size}: {held[row]}"


@pytest.mark.parametrize("length", [0, 3, 8, 9, 30])
def test_stock_caches_are_adopted_with_their_rows(length):
    for stock, ours in ((KVCache(), GrowingKVCache), (RotatingKVCache(8), WindowedKVCache)):
        for p in range(length):
            stock.update_and_fetch(*rows(p, 1))
        adopted = ours.adopt(stock)
        first = 0 if ours is GrowingKVCache else max(0, length - 7)
        assert adopted.offset == length
        assert positions(adopted.update_and_fetch(*rows(length, 2))) == list(range(first, length + 2))


@pytest.mark.parametrize("length", [0, 3, 8, 9, 30, 130])
def test_state_makes_the_same_cache_again(length):
    for cache in (GrowingKVCache(), WindowedKVCache(8, slack=3)):
        for p in range(length):
            cache.update_and_fetch(*rows(p, 1))
        again = type(cache).from_state(cache.state)
        expected = positions(cache.update_and_fetch(*rows(length, 2)))
        assert again.offset == length
        assert positions(again.update_and_fetch(*rows(length, 2))) == expected
        assert again.trim(2) == 2


@pytest.mark.parametrize("length", [0, 5, 30])
def test_our_file_is_read_by_mlx_lm_as_its_own_caches(length, tmp_path):
    caches = [GrowingKVCache(), WindowedKVCache(8)]
    for cache in caches:
        for p in range(length):
            cache.update_and_fetch(*rows(p, 1))
    mlx_dflash.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [type(c) for c in loaded] == [KVCache, RotatingKVCache]
    for cache, first in zip(loaded, (0, max(0, length - 7))):
        assert cache.offset == length
        fetched = sorted(positions(cache.update_and_fetch(*rows(length, 1))))
        assert fetched == list(range(first, length + 1)), f"{type(cache).__name__} holds {fetched}"


def address(array):
    """Where the data of an evaluated array lies."""
    return np.array(array, copy=False).__array_interface__["data"][0]


def addresses(caches):
    mx.eval([(c.keys, c.values) for c in caches])
    return [address(part) for c in caches for part in (c.keys, c.values)]


@pytest.mark.parametrize("cache", [GrowingKVCache(), WindowedKVCache(40, slack=8)], ids=["growing", "windowed"])
def test_an_append_copies_nothing_and_growth_is_rare(cache):
    moved, end, before = 0, 0, None
    for _ in range(400):
        fetched = cache.update_and_fetch(*rows(end, 4))
        mx.eval(mx.sum(fetched[0]) + mx.sum(fetched[1]))
        del fetched
        cache.trim(1)
        end += 3
        now = addresses([cache])
        moved += now != before
        before = now
    # Growing: by a quarter at each step. Windowed: whenever the slack, at least 40 // 4 rows, is used up.
    most = 14 if isinstance(cache, GrowingKVCache) else 1200 // 10
    assert moved <= most, f"the buffers moved {moved} times in 400 appends; at most {most} were expected"


def test_a_run_of_n_tokens_copies_order_n_rows():
    cache, copied, capacity = GrowingKVCache(), 0, 0
    rows = mx.zeros((1, 1, 100, 1))
    for before in range(0, 20_000, 100):
        cache.update_and_fetch(rows, rows)
        if cache.keys.shape[2] != capacity:
            copied, capacity = copied + before, cache.keys.shape[2]
    assert copied <= 5 * 20_000, f"{copied} rows were copied for 20000"


def test_rounds_copy_no_cache():
    """Neither the target's caches nor the draft's move between rounds while there is reserved room."""
    draft = make_draft(draft_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8))
    watch = Watch(tiny_target("llama_sliding"), list(range(20)), [2, 5, 0, 3], num_tokens=50, draft=draft)
    watch.target.reserve(200), watch.inner.reserve(200)
    caches = [*watch.target.caches, *watch.inner.caches]
    rounds = watch.rounds()
    next(rounds), next(rounds)
    before, moved = addresses(caches), 0
    for _ in rounds:
        now = addresses(caches)
        moved += sum(a != b for a, b in zip(now, before))
        before = now
    windowed = sum(2 for c in caches if isinstance(c, WindowedKVCache))
    assert moved <= windowed, f"buffers moved {moved} times; only the {windowed} windowed ones may be compacted, once"
