"""The one door to a device's memory: what it holds, what it will report, and how it is kept in order."""
