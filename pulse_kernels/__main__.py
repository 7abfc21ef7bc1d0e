"""``python -m pulse_kernels``."""

import sys

from pulse_kernels.cli import main

sys.exit(main())
