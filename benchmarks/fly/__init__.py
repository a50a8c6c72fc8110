"""Bursts and priorities on static dp, static tp and a layout that changes by itself: `make bench-fly`."""
