"""Parameters of tests."""


def crossed(*lists):
    """Cases with each value of each list, as many as the longest has: for code that decides by one value."""
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]
