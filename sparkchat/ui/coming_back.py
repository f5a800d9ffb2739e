"""Being stopped, and going on.

The library does both inside signal handlers: there they can wait for ever for a lock that the interrupted code holds.
And SIGSTOP cannot be seen coming: the library would then enter the full screen a second time on SIGCONT, remember the
raw line settings as the user's, and leave the keyboard protocol on at the end, taken back once and set twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from typing import Any

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver


def watch_stops(app: App[Any]) -> None:
    """Take SIGTSTP and SIGCONT over from the library; called in the running app."""
    driver = app._driver
    if isinstance(driver, LinuxDriver):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, _stop, driver)
        loop.add_signal_handler(signal.SIGCONT, _come_back, app, driver)


def _stop(driver: LinuxDriver) -> None:
    if driver._auto_restart:
        driver.suspend_application_mode()
        driver._must_signal_resume = True
    os.kill(os.getpid(), signal.SIGSTOP)


def _come_back(app: App[Any], driver: LinuxDriver) -> None:
    if not driver._auto_restart:
        return  # an editor has the terminal; it is taken back when that ends
    if not _is_there(driver):
        return  # the system sends SIGCONT behind the SIGHUP of a terminal that goes away
    if not driver._must_signal_resume:
        driver.suspend_application_mode()
    driver.resume_application_mode()
    app.refresh(layout=True)


def _is_there(driver: LinuxDriver) -> bool:
    try:
        termios.tcgetattr(driver.fileno)
    except (termios.error, OSError, ValueError):
        return False
    return True
