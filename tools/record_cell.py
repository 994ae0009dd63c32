# @title Record this device for the gallery (about ten minutes)
"""Measure this device, and write a file that you can offer in a pull request.

`tools/edition.py` puts this file into the last cell of notebook 10.
"""

RECORD = False  # @param {type:"boolean"}

if RECORD:
    import sys
    from pathlib import Path

    import course

    sys.path.insert(0, str(Path(course.__file__).resolve().parents[2] / "tools"))
    from record import record_device

    record_device(minutes=10)
else:
    print("Set RECORD to True to measure this device and to see it beside those of the gallery.")
