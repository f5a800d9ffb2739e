"""The memory plan as commands show it, and as ``run`` and its kin obey it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkchat.catalog import DrafterRef, ModelRef
from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError, Unreachable, UsageError
from sparkchat.fit import (
    Machine,
    describe_parts,
    describe_plan,
    fewest_devices,
    fitting_context,
    free_on,
    needs_of,
    plans_by_devices,
    setting_of,
    shown_tokens,
    this_machine,
)
from sparkchat.memory_plan import SMALLEST_CONTEXT, MemoryPlan
from sparkchat.params import LoadSpec
from sparkchat.paths import Paths
from sparkchat.resolve import Resolution, resolve_options
from sparkchat.store import human


def memory_report(
    model: ModelRef, drafter: DrafterRef, context: int | None, paths: Paths, *, ask_hub: bool = False
) -> dict[str, Any]:
    """``memory_plan`` for ``show`` and ``pull --dry-run``; None where the headers are not to be had."""
    options = resolve_options(model.profile, {}, os.environ)
    machine = this_machine(options["device"])
    wanted = context if context is not None else options["context"]
    try:
        plans = plans_by_devices(model, drafter, paths, setting_of(options, machine, 1), ask_hub=ask_hub)
    except UsageError:
        if ask_hub:  # bytes that nobody wants, as they cannot be run
            raise
        plans = {}
    except SparkchatError:
        # The command itself says what is wrong with the source.
        plans = {}
    plan = plans.get(options["tp"])
    limit = options["cache_tokens"]
    return {"memory_plan": None if plan is None else _as_json(plan, plans, machine, wanted, limit)}


def _as_json(
    plan: MemoryPlan, plans: Mapping[int, MemoryPlan], machine: Machine, context: int | None, limit: int | None
) -> dict[str, Any]:
    """``plans``: by number of devices; ``limit``: of the cache's tokens."""
    shown = plan.max_context if context is None else min(context, plan.max_context)
    free = free_on(machine, plan.num_devices)
    largest = None if free is None else plan.largest_context(free)
    wanted = min(SMALLEST_CONTEXT, plan.max_context) if context is None else shown
    tokens = shown_tokens(plan, shown, limit, free)
    lines = describe_plan(plan, machine, context, limit)
    if len(plans) > 1:
        each = ", ".join(f"{count} x {human(other.total(shown))}" for count, other in plans.items())
        lines.append(f"by number of devices: {each}")
    return {
        "context": shown,
        "total_bytes": plan.total(shown, tokens),
        "total_bytes_by_devices": {str(count): other.total(shown) for count, other in plans.items()},
        "parts": plan.parts(shown, tokens),
        "cache_tokens": tokens,
        "num_caches": plan.num_caches,
        "num_devices": plan.num_devices,
        "free_bytes": free,
        "largest_context": largest,
        "max_context": plan.max_context,
        "fits": largest is not None and largest >= wanted,
        "lines": lines,
    }


def refuse_before_fetch(
    model: ModelRef, drafter: DrafterRef, options: Resolution, paths: Paths, num_requests: int
) -> None:
    """Raise NotEnoughMemory or UsageError for a model that is still to be fetched, from its headers on the hub.

    A profile's own figure has been looked at already, and nobody waits for the hub because of it. What else is wrong
    is left to the fetch to say.
    """
    if needs_of(model.profile):
        return
    machine = this_machine(options["device"])
    try:
        plans = plans_by_devices(model, drafter, paths, setting_of(options, machine, num_requests), ask_hub=True)
    except (Unreachable, UsageError):
        raise
    except SparkchatError:
        return
    _fitting(plans, machine, options, model.name)


def within_memory(
    config: RunConfig, model: ModelRef, drafter: DrafterRef, options: Resolution, paths: Paths, num_requests: int
) -> tuple[LoadSpec, tuple[str, ...]]:
    """What to load, its context and cache such that they fit, and what to tell the user of it.

    Raises NotEnoughMemory with the numbers, and UsageError for a limit of a cache that nobody shares.
    """
    machine, spec = this_machine(options["device"]), config.spec
    plans = plans_by_devices(model, drafter, paths, setting_of(options, machine, num_requests))
    plan = plans.get(options["tp"])
    if plan is None:
        return spec, ()
    if spec.cache_tokens is not None and not plan.is_shared:
        asked = options.asked("cache_tokens")
        raise UsageError(f"{asked}: every request of {model.name} has a cache of its own; leave it out")
    context, sentences = _fitting_context(plan, plans, machine, options, spec.context, model.name)
    return replace(spec, context=context, cache_tokens=_limit(plan, machine, context, spec.cache_tokens)), sentences


def _limit(plan: MemoryPlan, machine: Machine, context: int | None, asked: int | None) -> int | None:
    """Tokens that all caches together may have; None where all of them fit. An engine on a GPU finds out for itself."""
    free = free_on(machine, plan.num_devices)
    if asked is not None or machine.has_gpus or not plan.is_shared or free is None:
        return asked
    context = plan.max_context if context is None else min(context, plan.max_context)
    tokens = plan.cache_tokens(context, free)
    # What is set aside lies in the same memory, and storage that grows is there twice while it does.
    return None if tokens >= plan.num_caches * context else max(context, tokens // 2)


def _fitting_context(
    plan: MemoryPlan,
    plans: Mapping[int, MemoryPlan],
    machine: Machine,
    options: Resolution,
    wanted: int | None,
    name: str,
) -> tuple[int | None, tuple[str, ...]]:
    fitting = _fitting(plans, machine, options, name)
    if fitting is None or (wanted is not None and fitting >= wanted):
        return wanted, ()
    full = plan.max_context if wanted is None else min(wanted, plan.max_context)
    free = human(free_on(machine, plan.num_devices) or 0)
    sentence = (
        f"the context is {fitting:,} tokens instead of {full:,}, which is what fits in {free} free: "
        f"{describe_parts(plan, fitting, fitting)}; give --context to choose"
    )
    return fitting, (sentence,)


def _fitting(plans: Mapping[int, MemoryPlan], machine: Machine, options: Resolution, name: str) -> int | None:
    plan, typed = plans.get(options["tp"]), typed_context(options)
    if plan is None:
        return None
    return fitting_context(plan, machine, typed, name, fewest_devices(plans, machine, typed))


def typed_context(options: Resolution) -> int | None:
    return options["context"] if options.is_typed("context") else None
