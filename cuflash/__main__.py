# SPDX-License-Identifier: Apache-2.0
"""First aid: ``python -m cuflash`` says what is installed, whether it works, and what to do."""

import sys

from .firstaid import main

sys.exit(main())
