"Did federated averaging erase what the clients learned, or is it still there and only misrouted?"
__version__ = "0.1.0"
