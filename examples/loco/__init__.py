"""PULSELoCo, DiLoCo and averaging at every step, side by side on the demo's task: ``make loco``."""
