"""sparkchat: a terminal chat whose engine shows every step of speculative decoding."""

__version__ = "0.1.0"
