"""Session traces (``*.spark.jsonl``, schema ``sparkchat.trace/1``): written, read, summed up and checked.

Standard library only.
"""

from sparkchat.trace.reader import DamagedLine, Trace, TraceLine, Turn, read_trace
from sparkchat.trace.schema import SCHEMA
from sparkchat.trace.summary import TraceSummary, summarize
from sparkchat.trace.verify import Failure, TurnReport, Verification, verify
from sparkchat.trace.writer import TraceWriter

__all__ = [
    "SCHEMA",
    "DamagedLine",
    "Failure",
    "Trace",
    "TraceLine",
    "TraceSummary",
    "TraceWriter",
    "Turn",
    "TurnReport",
    "Verification",
    "read_trace",
    "summarize",
    "verify",
]
