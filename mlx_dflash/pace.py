"""The pace: how many drafts a round verifies for the most tokens a second, and how long a step of reading is.

A longer block costs more and its last drafts are kept less often; which length is best depends on the machine, the
models and the text. So it is measured while the text is made. The tokens do not depend on it: the target decides them.
A long prompt is read in steps, and on a slow machine a step of the usual size takes half a minute, in which nobody can
stop it. There the steps are made shorter.
Knows counts and seconds only.
"""

_MEMORY = 0.95  # weight of the past against one more round, for the share of kept drafts
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 2.0  # share of kept drafts before anything is known; in rounds
_COST_MEMORY = 0.9  # the same for the cost of a round
_FIRST_CHECK, _LAST_CHECK = 16, 256  # rounds
_STEP_SECONDS = 1.0  # of reading, after which it can be stopped and shows its progress
_LEAST_STEP = 8  # tokens; fewer would cost as much


class Pace:
    """Choice between blocks of 1 row, which drafts nothing, of 2, 3, 4, 8, 16, ... rows, and the longest one.

    most: drafts of the longest block. costs: seconds a round by its number of drafts, as an earlier Pace of the same
    models left them; they are learned further, in place.
    """

    def __init__(self, most: int, costs: dict[int, float] | None = None):
        rows = {3, most + 1, *(2**i for i in range((most + 1).bit_length()))}
        self.choices = sorted((n - 1 for n in rows if n <= most + 1), reverse=True)
        self._costs = {} if costs is None else costs
        self._warm = set(self._costs)
        self._kept = [0.0] * most  # rounds that kept draft i, out of ...
        self._tried = [0.0] * most  # ... the rounds that tried it, having kept all before it
        self._latest = dict.fromkeys(self.choices, 0)  # the round that each choice was made in
        self._round, self._next_check, self._check_every = 0, _FIRST_CHECK, _FIRST_CHECK

    @property
    def num_drafts(self) -> int:
        """Drafts to verify in the next round."""
        unknown = [k for k in self.choices if k not in self._costs]
        if unknown:
            return unknown[0]
        if self._round >= self._next_check:
            return min(self.choices, key=lambda choice: self._latest[choice])
        return self._best()

    def _best(self) -> int:
        return max(self.choices, key=lambda k: self._expected_tokens(k) / self._costs[k])

    def _expected_tokens(self, num_drafts: int) -> float:
        tokens = chance = 1.0
        share = _FIRST_GUESS
        for kept, tried in zip(self._kept[:num_drafts], self._tried):
            # Where little has been tried, a draft is taken to be as good as the one before it.
            share = (kept + _GUESS_WEIGHT * share) / (tried + _GUESS_WEIGHT)
            chance *= share
            tokens += chance
        return tokens

    def learn(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Take note of a finished round."""
        self._round += 1
        for i in range(min(num_accepted + 1, num_drafts)):
            self._tried[i] = _MEMORY * self._tried[i] + 1
            self._kept[i] = _MEMORY * self._kept[i] + (i < num_accepted)
        if num_drafts not in self._latest:
            return  # cut short by the end of the text
        before = self._best() if len(self._costs) == len(self.choices) else None
        self._latest[num_drafts] = self._round
        if num_drafts in self._warm:
            known = self._costs.get(num_drafts, seconds)
            # A round that was held up says little.
            self._costs[num_drafts] = _COST_MEMORY * known + (1 - _COST_MEMORY) * min(seconds, 2 * known)
        self._warm.add(num_drafts)  # the first round of a size may compile
        if before is not None and self._round > self._next_check:
            self._schedule(changed=self._best() != before)

    def _schedule(self, changed: bool) -> None:
        """Check another choice soon if the last check changed the best one, else later and later."""
        self._check_every = _FIRST_CHECK if changed else min(2 * self._check_every, _LAST_CHECK)
        self._next_check = self._round + self._check_every


class ReadingPace:
    """Choice of the number of prompt tokens that are read in one step, so that a step takes about a second.

    first: number of tokens of the first step, before anything is known; it grows and shrinks with what is learned.
    """

    def __init__(self, first: float = float("inf")):
        self._tokens = first  # that are read in _STEP_SECONDS

    def step(self, most: int) -> int:
        """Return the number of tokens to read next, at most `most`."""
        return int(min(most, max(self._tokens, _LEAST_STEP)))

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take note of a finished step."""
        # The few tokens at the end of a prompt cost more each, and say nothing of a long step.
        if seconds > _STEP_SECONDS or 2 * num_tokens >= self._tokens:
            self._tokens = num_tokens * _STEP_SECONDS / max(seconds, 1e-6)
