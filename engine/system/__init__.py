"""The machine and the process under the engine: files, children, processors, memory, the version."""
