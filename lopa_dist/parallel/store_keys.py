"""The keys of the store that all ranks of a job share; the other files of this package take them from here.

===================  ================================  ==========================  ===================================
key                  written by                        read by                     what for
===================  ================================  ==========================  ===================================
``joined``           every rank, counting up           every rank                  barrier: all processes have started
``here``             every rank, appending             every rank                  numbers and hosts, to name the lost
``ready``            every rank, counting up           every rank                  barrier: all models are loaded
``prepared``         every rank, counting up           every rank                  barrier: all devices are prepared
``agreed/NAME``      every rank, counting up           every rank                  barrier: all would do the same
``broadcast/NAME``   rank 0                            every rank                  a value of rank 0
``sum/NAME``         every rank, adding                every rank                  a sum over the ranks
``summed``           every rank, counting up           every rank                  barrier: all have added to the sums
``gather/R``         the leader of replica R           every rank                  how many parts its text has
``gather/R/N``       the leader of replica R           every rank                  part N of its text
``gather written``   every rank, counting up           every rank                  barrier: all texts are written
``gather read``      every rank, counting up           every rank                  barrier: all texts are read
``taken/N``          leaders, adding                   leaders                     requests that were taken in round N
``lesson/NAME``      every rank, counting up           every rank                  barrier: all are to learn together
``asked/NAME``       every rank, counting up           every rank                  barrier: all say if asked to stop
``progress/NAME``    leaders, adding                   rank 0                      the job's counters for its display
``stop``             a rank that was asked to stop     every rank                  the signal's name
``early``            a rank that was stopped           every rank                  why it left before the first step
``failures``         ranks that fail, counting up      the same                    only the first of them is announced
``failed``           the first rank that failed        every rank                  its name and its error
``beat/RANK``        a thread of that rank             every rank                  a count that rises while it is alive
``silent``           rank 0                            every rank                  a count that rises, and who is silent
``waits/RANK``       a thread of that rank             ranks of its replica        how often it waited for its device
``left``             every rank, counting up           rank 0; a rank told to end  who needs the store no more
===================  ================================  ==========================  ===================================

All of them have a prefix that is new whenever the ranks start or meet again. The following do not, because torchrun's
store outlives the ranks that it restarts:

===========================  ========================  ==========================  ===================================
key                          written by                read by                     what for
===========================  ========================  ==========================  ===================================
``lopa_dist/arrivals``       every rank, counting up   rank 0                      each gets a number of its own
``lopa_dist/welcome/N``      rank 0                    the rank with number N      the number of this start
``lopa_dist/N/found``        every rank, counting up   rank 0                      who has read the number of start N
``lopa_dist/stopped``        a rank that was stopped   every rank that starts      why it must not go on
===========================  ========================  ==========================  ===================================

Constants with ``{}`` are completed by `str.format`.
"""

from __future__ import annotations

ARRIVALS = "lopa_dist/arrivals"
WELCOME = "lopa_dist/welcome/{}"
FOUND = "lopa_dist/{}/found"
STOPPED = "lopa_dist/stopped"

JOINED = "joined"
HERE = "here"
READY = "ready"
PREPARED = "prepared"
AGREED = "agreed/{}"
BROADCAST = "broadcast/{}"
SUM = "sum/{}"
SUMMED = "summed"
GATHER_COUNT = "gather/{}"
GATHER_PART = "gather/{}/{}"
GATHER_WRITTEN = "gather written"
GATHER_READ = "gather read"
TAKEN = "taken/{}"
LESSON = "lesson/{}"
ASKED = "asked/{}"
PROGRESS = "progress/{}"
STOP = "stop"
EARLY = "early"
FAILURES = "failures"
FAILED = "failed"
BEAT = "beat/{}"
SILENT = "silent"
WAITS = "waits/{}"
LEFT = "left"
