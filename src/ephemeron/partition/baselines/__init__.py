"""Research baselines that no product path imports: NetSplit's route through ONNX. Placement methods to compare with are in `placement.baselines`,
because `place` compares every plan with them.
"""
