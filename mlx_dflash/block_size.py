"""The number of rows that a round verifies, as users ask for it: the one owner of its names and its limits.

A block is the anchor and its drafts, so block_size is one more than num_draft_tokens, which is mlx-lm's name. Knows
numbers; knows nothing of models, of flags or of requests.
"""

AUTO = "auto"  # the block size that proves fastest, measured while rounds run


def chosen_block_size(
    block_size: int | str | None, num_draft_tokens: int | None, has_draft: bool = True
) -> int | str | None:
    """Return the block size that the user asked for: a number of rows, "auto", or None if nothing was asked for.

    Raises ValueError if both names are given, if either is given without a draft, or for a text other than "auto".
    """
    if block_size is not None and num_draft_tokens is not None:
        raise ValueError(
            f"give block_size or num_draft_tokens, not both; got block_size {block_size} and "
            f"num_draft_tokens {num_draft_tokens}"
        )
    if not has_draft and not block_size is num_draft_tokens is None:
        raise ValueError("block_size and num_draft_tokens need a draft")
    if isinstance(block_size, str) and block_size != AUTO:
        raise ValueError(f'block_size must be a number or "{AUTO}", got {block_size!r}')
    return block_size if num_draft_tokens is None else num_draft_tokens + 1


def rows_of(block_size: int | None, num_drafts: int) -> int:
    """Return the most rows of a verify: block_size, or the whole trained block for None.

    num_drafts: tokens that the trained block proposes, DraftConfig.num_drafts; a draft that also samples from the
    anchor's row proposes one more. Raises ValueError if block_size is not 1 to num_drafts + 1.
    """
    most = num_drafts + 1
    if block_size is None:
        return most
    if not 1 <= block_size <= most:
        raise ValueError(f"block_size must be 1 to {most}, the block that the draft was trained with; got {block_size}")
    return block_size
