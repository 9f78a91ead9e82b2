"""Devices that only wait, and links that only delay: the real runtime without the hardware."""
