"""Lightning's older package, with a base class of its own."""


class Callback:
    """Has a hook for each event."""
