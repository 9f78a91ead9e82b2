"""What a plan will need, before it runs."""
