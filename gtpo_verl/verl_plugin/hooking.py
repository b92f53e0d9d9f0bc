"""How a function of verl is hooked: when its module is imported, and without a trace in what verl sees of it."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import verl
import wrapt

from gtpo_verl.verl_plugin import compat


def when_imported(module: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module of verl when it is imported, which must not fail because of that, whatever happens."""

    def change_safely(imported: ModuleType) -> None:
        try:
            change(imported)
        except Exception as error:
            why = f"this plugin does not fit {module} of verl {verl.__version__} ({type(error).__name__}: {error})"
            compat.load_errors[why] = None

    wrapt.register_post_import_hook(change_safely, module)


def hook_into(path: str, hook: Callable, module: ModuleType) -> None:
    """Call `hook` in place of `path` in a module of verl.

    What is called there stays a plain function of that name: it can be copied, and pickled to another process of Ray.

    Args:
        path (str): of a function, or of a class and its method, such as `PPOTrainer.fit`.
        hook: called with `proceed`, which calls the function as it was called; for a method with its instance; and, by
            name, with those of the function's arguments that are keyword-only parameters of the hook.

    Raises:
        AttributeError, TypeError: there is no such function, or it does not take the arguments that the hook reads.
    """
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, module)
    function = getattr(owner, name)
    if hasattr(function, "hooked_by_gtpo"):  # by way of another module, in which verl defines it
        return

    signature = inspect.signature(function)
    parameters_of_hook = inspect.signature(hook).parameters.values()
    read = [parameter.name for parameter in parameters_of_hook if parameter.kind is parameter.KEYWORD_ONLY]
    missing = [parameter for parameter in read if parameter not in signature.parameters]
    if missing:
        raise TypeError(f"{path} takes no {', '.join(missing)}: ({', '.join(signature.parameters)})")

    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        instance = list(call.arguments.values())[:1] if classes else []
        arguments = {parameter: call.arguments[parameter] for parameter in read}
        proceed = functools.partial(function, *args, **kwargs)
        return hook(proceed, *instance, **arguments)

    hooked.hooked_by_gtpo = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)

    # The function is also known where verl defines it, and to modules that verl imports before it loads plugins
    # (VERL_USE_EXTERNAL_MODULES).
    for other in list(sys.modules.values()):
        if type(other) is ModuleType and vars(other).get(name) is function:
            setattr(other, name, hooked)
