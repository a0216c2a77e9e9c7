"""The scheduler and its data: integers and the standard library only."""
