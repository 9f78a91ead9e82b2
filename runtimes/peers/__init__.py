"""Others' implementations on the same model and data: measured beside ours, and oracles of ours.

Importing this package does not load torch: what a peer cannot run is refused before a launch.
"""

from __future__ import annotations

from runtimes.peers.limits import check_peer

__all__ = ["check_peer"]
