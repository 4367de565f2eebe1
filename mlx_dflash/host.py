"""Token ids from the device to the host. Each call waits until the array is computed."""

from typing import cast

import mlx.core as mx


def read_ids(array: mx.array) -> list[int]:
    """Return the ids of an array (n,) as numbers."""
    return cast(list[int], array.tolist())


def read_id(array: mx.array) -> int:
    """Return the only id of an array as a number."""
    return cast(int, array.item())
