"""A process that fetches or removes a model in children of its own, so that a test can kill them at any moment.

It reads one JSON object a line: {"do": "pull" | "rm", "name": "hf:...", "kill_at": number or null}. It answers with the
child's process id, and when the child has ended with its status. ``kill_at`` n: the child kills itself before its n-th
change to the cache.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from sparkchat import hub, inventory
from sparkchat.catalog import parse_hub_name
from sparkchat.errors import SparkchatError
from sparkchat.locate import refetch
from sparkchat.paths import user_paths

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate"}


class Quiet:
    def say(self, message: str) -> None:
        return

    def update(self, what: str, done: int, total: int | None) -> None:
        return


def kill_before(number: int) -> None:
    """Watch every change to the hub's cache, and end without a goodbye before one of them."""
    cache, seen = str(user_paths().hub_cache), 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        is_write = event == "open" and isinstance(args[1], str) and args[1][:1] in "wax"
        if not is_write and event not in CHANGES:
            return
        if cache in str(args[0]) or (event in ("os.rename", "os.symlink") and cache in str(args[1])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def work(order: dict[str, Any]) -> int:
    if order["kill_at"] is not None:
        kill_before(order["kill_at"])
    source = parse_hub_name(order["name"])
    try:
        if order["do"] == "rm":
            inventory.remove((source,), user_paths())
        else:
            refetch((source,), order["name"], user_paths(), Quiet())
    except SparkchatError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def main() -> None:
    hub.ANSWER_SECONDS = 60.0  # a busy machine is no silent hub
    hub.reachability()  # opens nothing that a child could not share, but loads everything it needs
    hub.get_session().close()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(work(json.loads(line)))
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
