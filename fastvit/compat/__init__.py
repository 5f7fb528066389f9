"""Provides apex and inplace_abn for scripts that were written for them.

This command runs an unchanged script:

    python -m fastvit.compat script.py args...

`fastvit.compat.install()` provides the same imports in a running program.
"""

from ._import_hook import install

__all__ = ["install"]
