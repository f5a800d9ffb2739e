"""Session traces (``*.spark.jsonl``, schema ``sparkchat.trace/1``): written, read, summed up, checked and converted.

Standard library only.
"""

from sparkchat.trace.reader import Damage, DamagedLine, TraceLine, read_lines
from sparkchat.trace.schema import SCHEMA
from sparkchat.trace.summary import TraceSummary, summarize
from sparkchat.trace.turn_check import Failure, TurnReport
from sparkchat.trace.verify import Verification, verify
from sparkchat.trace.writer import TraceWriter

__all__ = [
    "SCHEMA",
    "Damage",
    "DamagedLine",
    "Failure",
    "TraceLine",
    "TraceSummary",
    "TraceWriter",
    "TurnReport",
    "Verification",
    "read_lines",
    "summarize",
    "verify",
]
