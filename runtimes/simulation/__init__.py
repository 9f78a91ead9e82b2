"""Clusters, and programs executed on them without hardware."""
