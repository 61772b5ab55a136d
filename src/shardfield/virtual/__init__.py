"""Many ranks on one device, one after the other: fields larger than the device, without a launcher."""

from .virtualize import virtualize as virtualize
from .world import VirtualWorld as VirtualWorld
