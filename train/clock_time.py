"""Times on a twelve-hour dial: how they are read from text, and how far apart two of them are."""

import re

MINUTES_OF_A_TURN = 720

# One or two digits, exactly two, and seconds perhaps; neither longer numbers nor further colons around them.
_TIME = re.compile(
    r"(?<![0-9:.])(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?(?![0-9:]|\.[0-9])", re.ASCII
)


def parse_time(text: str) -> int | None:
    """Find the last time of a text, in minutes after the dial's 0:00, with 12 kept as 12.

        H:MM[:SS], 0 <= H <= 23, MM and SS up to 59        minutes = 60 ((H - 1) mod 12 + 1) + MM

    So 0:05 is 12:05 and 15:10 is 3:10; "am", "pm" and seconds change nothing. Times in words
    are not read.

    Returns:
      Minutes from 60 (1:00) to 779 (12:59), or None: "1:5", "24:00" and "3:60" are no times.

    Example:
      >>> parse_time("It is 3:10 pm."), parse_time("15:10"), parse_time("0:05"), parse_time("1:5")
      (190, 190, 725, None)
    """
    minutes = None
    for match in _TIME.finditer(text):
        hour, minute, second = int(match["hour"]), int(match["minute"]), int(match["second"] or 0)
        if hour <= 23 and minute <= 59 and second <= 59:
            minutes = 60 * ((hour - 1) % 12 + 1) + minute
    return minutes


def dial_gap(minutes: float, gold_minutes: float) -> float:
    """Give the time between two places of the dial, the shorter way round.

        d = |minutes - gold_minutes| mod 720,    gap = min(d, 720 - d)

    Example:
      >>> dial_gap(parse_time("11:58"), parse_time("12:02")), dial_gap(parse_time("12:55"), parse_time("1:00"))
      (4, 5)
    """
    distance = abs(minutes - gold_minutes) % MINUTES_OF_A_TURN
    return min(distance, MINUTES_OF_A_TURN - distance)
