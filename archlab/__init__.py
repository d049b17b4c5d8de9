"""archlab: which attention, and which FFN, for my budget?"""

__version__ = "0.1.0"
