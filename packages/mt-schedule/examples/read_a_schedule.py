"""Print 1F1B, time it, and let the checker find what a careless edit breaks."""

import dataclasses

from mt_schedule import check, insert_communication, make_schedule, simulate

schedule = make_schedule("1f1b", stages=4, microbatches=8)
print(schedule)
print("violations:", check(schedule))

timed = simulate(schedule)
print(f"makespan {timed.makespan}, (m + p - 1)(t_F + t_B) = {(8 + 4 - 1) * 3.0}")
print("bubble:", [f"{share:.0%}" for share in timed.bubble])
print("peak activations:", timed.peak_activations)

print("\nRank 1 with its sends and receives:")
print(" ".join(f"{a.op}{a.microbatch}" for a in insert_communication(schedule).ranks[1]))

print("\nRank 2 without its third forward:")
rank = schedule.ranks[2]
broken = dataclasses.replace(
    schedule, ranks=(*schedule.ranks[:2], tuple(a for a in rank if a != rank[3]), schedule.ranks[3])
)
for violation in check(broken):
    print(violation)
