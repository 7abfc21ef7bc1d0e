"""What ``bench/device_check.py`` is made of: steps, cases to measure, clocks, goals, report."""
