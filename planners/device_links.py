"""Which devices of a machine are close to each other, from the links between them."""

import re
from collections.abc import Iterable, Mapping

_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the tool underlines the header of its table
_GPU = re.compile(r"GPU(\d+)")

# Kinds of links from the fastest: NVLink (NV1, NV18, ...); one PCIe switch or several; one socket; any.
_KINDS = (r"NV\d+", r"NV\d+|PIX|PXB", r"NV\d+|PIX|PXB|PHB|NODE")


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Links of `nvidia-smi topo -m`, by pair of devices, the lower index first."""
    lines = [[cell.strip() for cell in line.split("\t")] for line in _STYLE.sub("", text).splitlines()]
    header = next((cells for cells in lines if not cells[0] and any(map(_GPU.fullmatch, cells))), [])
    columns = {place: int(found[1]) for place, cell in enumerate(header) if (found := _GPU.fullmatch(cell))}
    links = {}
    for cells in lines:
        row = _GPU.fullmatch(cells[0])
        for place, column in columns.items() if row else ():
            if row is not None and int(row[1]) < column and place < len(cells):
                links[int(row[1]), column] = cells[place]
    return links


def domains_of(links: Mapping[tuple[int, int], str]) -> dict[int, int]:
    """The domain of each device: the lowest index in it.

    All devices of a domain are linked with each other by the fastest kind of link that the machine has. Where no two
    devices have better than the way between sockets, all are one domain.

    Args:
        links: by pair of devices, the lower index first.
    """
    indices = sorted({index for pair in links for index in pair})
    for kind in _KINDS:
        close = {pair for pair, link in links.items() if re.fullmatch(kind, link)}
        if close:
            return _cliques(indices, close)
    return dict.fromkeys(indices, min(indices, default=0))


def _cliques(indices: Iterable[int], close: set[tuple[int, int]]) -> dict[int, int]:
    """From the lowest index on, each device joins the first domain whose members are all close to it."""
    domains: list[list[int]] = []
    for index in indices:
        found = next((domain for domain in domains if all((other, index) in close for other in domain)), None)
        if found is None:
            domains.append([index])
        else:
            found.append(index)
    return {index: domain[0] for domain in domains for index in domain}
