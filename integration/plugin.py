"""The entry point of group `sglang.srt.plugins`: what kvtier changes in an unmodified SGLang.

SGLang calls `load` once in every process, then applies the hooks; a plugin that raises and a hook
whose target is gone are only logged. `missing` therefore looks afterwards whether all took.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtier.errors import KvtierError
from kvtier.integration import patches
from kvtier.integration.patches.scheme import Hook, Patch, lost
from kvtier.patches import VARIABLE, Choice, choices

log = logging.getLogger(__name__)

BACKEND = "kvtier"
"""The name that --hicache-storage-backend gets."""

_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_ATTACHMENT = "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_FACTORY = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def load() -> None:
    """Register the backend and all hooks, also those of the patches that are on.

    Ends the process for a patch that doesn't exist or whose value makes no sense: of any other
    exception SGLang would only write a line, and serve without it.
    """
    StorageBackendFactory.register_backend(BACKEND, "kvtier.integration.storage", "KvtierStorage")
    hooks = [*HOOKS]
    try:
        for choice, patch in patches_on():
            patch.install(choice.value)
            hooks.extend(patch.hooks)
    except KvtierError as error:
        sys.exit(f"kvtier: {error}")
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.type)


@functools.cache
def patches_on() -> tuple[tuple[Choice, Patch], ...]:
    """The patches that the environment turns on, and those that are always on, with their code.

    Raises ConfigError for a name that is none.
    """
    return tuple((one, patches.code(one.patch.name)) for one in choices(os.environ) if one.on)


def missing() -> list[str]:
    """What of SGLang kvtier relies on and doesn't find, in words; empty if all is well."""
    found = [problem for hook in HOOKS if (problem := _problem(hook))]
    for choice, _ in patches_on():
        if choice.patch.always:
            found.extend(patch_problems(choice.patch.name))
    if BACKEND not in StorageBackendFactory._registry:
        found.append("StorageBackendFactory.register_backend (has not taken)")
    try:
        from kvtier.integration import contract
    except (ImportError, AttributeError) as error:
        return [*found, str(error)]
    return found + contract.missing()


def refuse_if_incomplete() -> None:
    """Raise KvtierError with the names of what is missing."""
    names = missing()
    if names:
        import sglang

        raise KvtierError(
            f"This SGLang ({sglang.__version__}) lacks what kvtier needs: {'; '.join(names)}. "
            "Use SGLang 0.5.23, or a kvtier made for this version."
        )


def patch_problems(name: str) -> list[str]:
    """What of SGLang a patch relies on and doesn't find, in words; also for one that is off."""
    patch = patches.code(name)
    on = any(choice.patch.name == name for choice, _ in patches_on())
    return lost(patch) + [found for hook in patch.hooks if (found := _problem(hook, taken=on))]


def refuse_patches(server_args: Any) -> None:
    """Raise KvtierError if a patch was asked for that this SGLang or this server can't have."""
    asked = [(choice, patch) for choice, patch in patches_on() if not choice.patch.always]
    for choice, patch in asked:
        name = choice.patch.name
        remedy = "unset it" if choice.source != VARIABLE else f"take {name} out of it"
        if problems := patch_problems(name):
            import sglang

            raise KvtierError(
                f"{choice.source} turns on {name}, for which this SGLang ({sglang.__version__}) "
                f"lacks {'; '.join(problems)}: {remedy}, or use SGLang 0.5.23."
            )
        if reason := patch.refusal(server_args):
            raise KvtierError(
                f"{choice.source} turns on {name}, and {reason}. Change that, or {remedy}."
            )
    if asked:
        log.info("kvtier: patches on: %s", " ".join(choice.patch.name for choice, _ in asked))


# --- the hooks ----------------------------------------------------------------------------------


def _offer_backend(result: None, parser: argparse.ArgumentParser) -> None:
    """The flag's choices are a fixed list (arg_groups/fields/memory.py)."""
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None:
            action.choices = [*action.choices, BACKEND]


def _check_before_start(server_args: Any) -> None:
    """Arguments are resolved in the launcher, before any model is read."""
    from kvtier.integration.preflight import check

    if not getattr(server_args, "_resolution_finished", False):
        try:
            refuse_patches(server_args)
        except KvtierError as error:
            sys.exit(f"kvtier: {error}")
    check(server_args)


def _build_backend(
    original: Callable[..., Any], cls: type, backend_name: str, backend_class: type, *args: Any
) -> Any:
    """The factory raises for names it doesn't know. `args`: storage config, host pool."""
    if backend_name != BACKEND:
        return original(cls, backend_name, backend_class, *args)
    refuse_if_incomplete()
    return backend_class(*args)


def _move_pages_by_address(result: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    """The page functions are chosen from a list of backend names (cache_controller.py:644)."""
    backend = ours(controller)
    if backend is not None:
        backend.parents_first = controller.write_policy != "write_back"
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def _undo_failed_attach(
    original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any
) -> Any:
    """Pools are registered after the base class has attached, which leaves a controller attached
    to a backend that refused them: the next attach would be refused, too."""
    try:
        return original(controller, *args, **kwargs)
    except Exception:
        if ours(controller) is not None:
            controller.detach_storage_backend()
        raise


def _back_up_shards(result: bool, controller: Any, transfer: Any) -> bool:
    """Where one rank writes what MLA replicates, the others still hold recurrent states and MHA
    draft pools of their own; upstream stores the latter for Mooncake only."""
    if result or ours(controller) is None:
        return result
    from kvtier.integration.engine import is_writer

    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    return entry is not None and is_writer(
        str(transfer.name), entry.host_pool, controller.storage_config
    )


def _tell_of_chains(
    original: Callable[..., Any], attachment: Any, *args: Any, **kwargs: Any
) -> Any:
    """A page's place in its chain comes only with `hicache_storage_pass_prefix_keys`, and how many
    pages of a sliding window a boundary needs is known to the tree (components/swa.py).

    Start and run-time attach both publish their settings through this one method.
    """
    backend = ours(attachment._cache.cache_controller)
    if kwargs.get("enable_storage") and backend is not None:
        kwargs["hicache_storage_pass_prefix_keys"] = True
        components = attachment._cache._components_tuple
        windows = [getattr(component, "full_window_pages", 0) for component in components]
        backend.window_pages = max(windows, default=0)
    return original(attachment, *args, **kwargs)


def _say_what_does_not_fit(
    result: tuple[Any, int],
    controller: Any,
    operation: Any,
    hit_tokens: int,
    *,
    allow_partial: bool,
    **_: Any,
) -> tuple[Any, int]:
    """SGLang reads as much of a hit as host memory has room for, and says so on no log. Without
    `allow_partial` it tries again later instead."""
    indices, length = result
    fits = 0 if indices is None else length
    backend = ours(controller)
    if backend is not None and allow_partial and fits < hit_tokens:
        backend.complaints.add(
            "host memory",
            f"host memory has room for {fits:,} of {hit_tokens:,} stored tokens of a prompt, the "
            "rest is computed again: raise --hicache-ratio or --hicache-size.",
        )
    return result


def _forget_weights(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Weights replaced at run time make other pages under the same identity."""
    from kvtier.integration.storage import weights_replaced

    weights_replaced()


def ours(controller: Any) -> Any:
    """The KvtierStorage of a HiCache controller, by name or as dynamic backend; else None."""
    from kvtier.integration.storage import KvtierStorage

    backend = getattr(controller, "storage_backend", None)
    # SGLang's failure injector for tests wraps the backend.
    backend = getattr(backend, "_backend", backend)
    return backend if isinstance(backend, KvtierStorage) else None


HOOKS = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        _offer_backend,
        ("parser",),
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        HookType.BEFORE,
        _check_before_start,
        ("self",),
    ),
    Hook(
        f"{_FACTORY}._create_builtin_backend",
        HookType.AROUND,
        _build_backend,
        ("cls", "backend_name", "backend_class", "storage_config", "mem_pool_host"),
    ),
    Hook(
        f"{_CONTROLLER}.attach_storage_backend",
        HookType.AFTER,
        _move_pages_by_address,
        ("self", "storage_backend", "storage_backend_extra_config"),
    ),
    Hook(
        f"{_HYBRID}.attach_storage_backend",
        HookType.AROUND,
        _undo_failed_attach,
        ("self", "storage_backend", "host_pools"),
    ),
    Hook(f"{_HYBRID}.should_backup", HookType.AFTER, _back_up_shards, ("self", "transfer")),
    Hook(
        f"{_ATTACHMENT}.apply_runtime_config",
        HookType.AROUND,
        _tell_of_chains,
        ("self", "hicache_storage_pass_prefix_keys", "enable_storage"),
    ),
    Hook(
        f"{_HYBRID}.allocate_storage_hit",
        HookType.AFTER,
        _say_what_does_not_fit,
        ("self", "operation", "hit_tokens", "allow_partial"),
    ),
    *(
        Hook(
            f"{_UPDATER}.update_weights_from_{source}",
            HookType.BEFORE,
            _forget_weights,
            ("self", "recv_req"),
        )
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
)


# --- whether they took --------------------------------------------------------------------------


def _problem(hook: Hook, taken: bool = True) -> str | None:
    """What is wrong with a hook's target and, if it should have `taken`, with the hook."""
    owner, name = hook.target.rsplit(".", 1)
    try:
        function = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError):
        return f"{hook.target} (not there)"
    layers = list(_layers(getattr(function, "__func__", function)))
    parameters = inspect.signature(layers[-1]).parameters
    lost = [parameter for parameter in hook.parameters if parameter not in parameters]
    if lost:
        return f"{hook.target} (without {', '.join(lost)})"
    if taken and not any(hook.function is held for layer in layers for held in _held(layer)):
        return f"{hook.target} (the hook has not taken)"
    return None


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function and what it wraps, from the outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]


def _held(function: Callable[..., Any]) -> list[Any]:
    """What a wrapper's closure holds: SGLang's keeps the hook there."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
