"""What a step does when something goes wrong on a rank: found, agreed on by all, mended or stopped."""
