"""Many ranks on one device, one after the other: fields larger than the device, without a launcher."""

from .world import VirtualWorld as VirtualWorld
