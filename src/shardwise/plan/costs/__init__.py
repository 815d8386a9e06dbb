"""What a kernel takes on a device, and a collective on links: seconds by size. No torch."""
