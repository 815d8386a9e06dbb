"""Devices, links and clusters: as data (`cluster`), and measured on this machine."""
