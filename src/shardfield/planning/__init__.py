"""Predict memory, communication and time of a training step on a mesh, by simulating ranks in one process."""

from .cost import DEVICES as DEVICES
from .cost import Cost as Cost
from .cost import Device as Device
from .cost import Link as Link
from .cost import Network as Network
from .cost import predict as predict
from .fake_world import simulated as simulated
from .fake_world import without_data as without_data
from .recorder import Seen as Seen
from .recorder import watch as watch
from .simulate import Subject as Subject
from .simulate import count as count
