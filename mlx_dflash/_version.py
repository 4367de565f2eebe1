"""The version of mlx_dflash, in one place."""

__version__ = "0.1.0"
