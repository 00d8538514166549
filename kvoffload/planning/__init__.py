"""From ids to copies, as numpy arrays. Nothing here touches a device.

build, BlockPlan, TransferPlan   blocks and slots of a transfer, as strided or flat operations   transfer_plan.py
as_parts, Folds                  the planes of each part of a load, and groups folded by them    layer_groups.py
"""
