"""From settings to a running engine: checks, device, progress, wiring."""
