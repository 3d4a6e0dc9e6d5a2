"""Word lists shared by the domains."""

from __future__ import annotations


def _words(text: str, separator: str | None = None) -> list[str]:
    """A list written as running text; `separator` where entries have spaces of their own."""
    return [" ".join(entry.split()) for entry in text.split(separator)]


NAMES = _words("""
    Mia Tom Anna Ben Lily Max Emma Leo Sara Jack Nora Sam Ella Finn Ruby Omar Zoe Adam Ivy Noah Clara Hugo Maya Paul
    Rosa Alex Nina Oscar Lucy Peter Alice Bob Eva John Kate Luis Mary David Laura Simon Julia Mark Sofia Daniel
""")
CHILDREN = NAMES[:20]
COLOURS = _words("blue red green yellow purple orange pink brown black white")
FOODS = _words("pizza soup rice pasta bread cake salad cheese apples pancakes noodles curry")
SPORTS = _words("football tennis chess swimming running cycling climbing dancing")
ANIMALS = _words("dog cat horse rabbit fox owl bear mouse bird frog duck turtle wolf lion sheep cow")
ITEMS = _words("apples books coins pencils shells stones cards eggs stamps balls marbles flowers")
THINGS = _words("""
    apple ball book box bread bridge button cake candle chair clock cloud coat cup desk door drum egg fan flag
    flower garden glass guitar hammer hat house jar key kite lamp leaf letter map milk mirror moon mountain needle
    ocean orange paper pen piano pillow plate pocket queen ring river road rope salt ship shirt shoe spoon star
    stone sugar sun table tent tower train tree umbrella valley violin wagon wall water whale wheel wind window
    winter wood yard zebra
""")
CITIES = _words("Paris London Rome Berlin Madrid Vienna Lisbon Dublin Oslo Athens")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
JOBS = _words("teacher doctor baker farmer painter driver nurse writer singer cook")

# Words of everyday and technical questions that the model cannot answer, only used to recognise such questions.
OPEN_NOUNS = _words(
    """
    quantum physics, the stock market, climate change, the Roman Empire, machine learning, photosynthesis, gravity,
    black holes, the economy, democracy, ancient Greece, modern art, jazz music, the human brain, vaccines, electric
    cars, global trade, the French Revolution, Shakespeare, the periodic table, DNA, neural networks, space travel,
    renewable energy, inflation, cooking, gardening, travel to Japan, Hawaii, marketing, software engineering,
    databases, the internet, social media, education, mental health, sleep, exercise, nutrition, philosophy, ethics,
    religion, law, contracts, taxes, insurance, real estate, football history, the Olympics, chess openings, poetry,
    film, photography, fashion, architecture, bridges, airplanes, ships, volcanoes, earthquakes, oceans, rivers,
    forests, birds, insects, dinosaurs, bacteria, viruses, medicine, surgery, chemistry, biology, mathematics,
    statistics, probability, geometry, calculus, algebra, logic, linguistics, grammar, translation, history,
    geography, politics, elections, war, peace, poverty, cities, villages, farming, fishing, mining, steel, plastic,
    recycling, water, air pollution, energy, nuclear power, solar panels, batteries, computers, robots, phones,
    games
""",
    ",",
)
OPEN_VERBS = _words("""
    explain describe compare discuss analyse summarise evaluate outline write draft create design develop propose
    imagine consider identify list provide generate suggest rewrite edit translate classify estimate calculate solve
    prove derive implement optimise review critique improve plan organise
""")
OPEN_FILLER = _words("""
    the a an of in on at to for with from by about into over after under between through during before against and
    or but if because while although however therefore this that these those it they we you he she his her their our
    its is are was were be been has have had do does did can could will would should may might must not very more
    most some any many much few several each every all both other another such same different new old good better
    best great small large long short high low early late first second last next public social important possible
    available likely certain clear strong whole real true main major human local national international economic
    political recent common current general natural simple single special time year people way day man thing woman
    life child world school state family student group country problem hand part place case week company system
    program question work government number night point home room mother area money story fact month lot right study
    book eye job word business issue side kind head house service friend father power hour game line end member law
    car city community name president team minute idea body information back parent face others level office door
    health person art war history party result change morning reason research girl guy moment air teacher force make
    take give find tell ask seem feel try leave call need become mean keep let begin help show hear play run move
    live believe bring happen write provide sit stand lose pay meet include continue set learn lead understand watch
    follow stop create speak read allow add spend grow open walk win offer remember love consider appear buy wait
    serve die send expect build stay fall cut reach kill remain suggest raise pass sell require report decide
    function value data input output model method process image text user file code list string integer return array
    price market cost rate percent total average distance speed per hour miles dollars bought sold each left
    structure theory experiment energy particle cell protein species temperature pressure volume equation formula
""")
