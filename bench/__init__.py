# SPDX-License-Identifier: Apache-2.0
"""Measurements and checks on a GPU; run from a checkout as ``python -m bench.<name>``."""
