"""From files and data sets to the rows of a step: the same under every plan."""
