"""`python -m mlx_dflash.generate`; the function of the same name is mlx_dflash.generate, from api.py."""

import sys
from types import ModuleType

from .api import generate
from .commands.flags import main


class _FunctionModule(ModuleType):
    """A module that can be called: importing it must not hide the function mlx_dflash.generate."""

    __call__ = staticmethod(generate)


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = _FunctionModule
