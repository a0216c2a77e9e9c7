"""/v1/files and /v1/batches: stored requests that run while the engine is idle."""
