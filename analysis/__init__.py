"""Statistics, tables and figures from run records; reads results/ only."""
