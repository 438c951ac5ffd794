# SPDX-License-Identifier: Apache-2.0
"""One module a kernel family: what it rejects and why, its candidate plans, best first."""
