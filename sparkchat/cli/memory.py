"""The memory plan as commands show it, and as ``run`` and its kin obey it."""

from __future__ import annotations

import os
from typing import Any

from sparkchat.catalog import DrafterRef, ModelRef
from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError, Unreachable
from sparkchat.fit import (
    Machine,
    describe_parts,
    describe_plan,
    fitting_context,
    free_on,
    needs_of,
    plan_for,
    setting_of,
    this_machine,
)
from sparkchat.memory_plan import SMALLEST_CONTEXT, MemoryPlan
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
        plan = plan_for(model, drafter, paths, setting_of(options, machine, 1), ask_hub=ask_hub)
    except SparkchatError:
        # The command itself says what is wrong with the source.
        plan = None
    return {"memory_plan": None if plan is None else _as_json(plan, machine, wanted)}


def _as_json(plan: MemoryPlan, machine: Machine, context: int | None) -> dict[str, Any]:
    shown = plan.max_context if context is None else min(context, plan.max_context)
    free = free_on(machine, plan.num_devices)
    largest = None if free is None else plan.largest_context(free)
    wanted = min(SMALLEST_CONTEXT, plan.max_context) if context is None else shown
    return {
        "context": shown,
        "total_bytes": plan.total(shown),
        "parts": plan.parts(shown),
        "num_caches": plan.num_caches,
        "num_devices": plan.num_devices,
        "free_bytes": free,
        "largest_context": largest,
        "max_context": plan.max_context,
        "fits": largest is not None and largest >= wanted,
        "lines": describe_plan(plan, machine, context),
    }


def refuse_before_fetch(
    model: ModelRef, drafter: DrafterRef, options: Resolution, paths: Paths, num_requests: int
) -> None:
    """Raise NotEnoughMemory for a model that is still to be fetched, from its headers on the hub.

    A profile's own figure has been looked at already, and nobody waits for the hub because of it. What else is wrong
    is left to the fetch to say.
    """
    if needs_of(model.profile):
        return
    machine = this_machine(options["device"])
    try:
        plan = plan_for(model, drafter, paths, setting_of(options, machine, num_requests), ask_hub=True)
    except Unreachable:
        raise
    except SparkchatError:
        return
    if plan is not None:
        fitting_context(plan, machine, typed_context(options), model.name)


def within_memory(
    config: RunConfig, model: ModelRef, drafter: DrafterRef, options: Resolution, paths: Paths, num_requests: int
) -> tuple[int | None, tuple[str, ...]]:
    """The context to run with, and what to tell the user of it. Raises NotEnoughMemory with the numbers."""
    machine = this_machine(options["device"])
    plan = plan_for(model, drafter, paths, setting_of(options, machine, num_requests))
    wanted = config.spec.context
    if plan is None:
        return wanted, ()
    fitting = fitting_context(plan, machine, typed_context(options), model.name)
    if fitting is None or (wanted is not None and fitting >= wanted):
        return wanted, ()
    full = plan.max_context if wanted is None else min(wanted, plan.max_context)
    free = human(free_on(machine, plan.num_devices) or 0)
    sentence = (
        f"the context is {fitting:,} tokens instead of {full:,}, which is what fits in {free} free: "
        f"{describe_parts(plan, fitting)}; give --context to choose"
    )
    return fitting, (sentence,)


def typed_context(options: Resolution) -> int | None:
    return options["context"] if options.is_typed("context") else None
