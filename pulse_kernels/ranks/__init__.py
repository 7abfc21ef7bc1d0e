"""The ranks of a process group: bytes between them without pickle, and steps that all take or none."""
