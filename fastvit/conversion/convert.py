"""The module by whose name pickles of converted models find the hook, which gets no keyword arguments."""

from . import scope_hooks


class ScopeHook(scope_hooks.ScopeHook):
    """The hook of a model whose pickle has registered it without keyword arguments."""

    def __call__(self, module, args, *result):  # type: ignore[override]
        super().__call__(module, args, {}, *result, depth=2)
