"""Wire version: what a process reads beyond fields with defaults, as its heartbeat says.

A message that earlier processes would misread counts up the version. It is written only while all readers
read it, so two releases serve one pool side by side, in any order of their replacement. CONTRIBUTING.md has
the rule.
"""

WIRE_VERSION = 3
"""What this release reads. A process whose heartbeat says none reads version 1."""
TOKEN_COLUMNS_SINCE = 2
"""First version whose readers find tokens in `Events.columns`."""
ADAPTERS_SINCE = 3
"""First version whose gateways and batchers pass on the adapter of a request."""
