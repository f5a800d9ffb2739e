"""``python -m sparkchat``."""

import sys

from sparkchat.cli.main import main

sys.exit(main())
